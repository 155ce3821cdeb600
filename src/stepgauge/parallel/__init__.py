"""Takes any nn.Module and spreads its training over ranks. Knows torch.distributed and the plans in
spec, no model.
"""
