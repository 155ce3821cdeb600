"""What a trace of torch.profiler says: kernels and their kinds, ranges, idle time, overlap. Needs
no torch.

read       the file, event by event
events     what an event means: calls on the host, kernels on the device
attribution    who asked for each kernel: operation, range and phase
analysis   all of it together
"""
