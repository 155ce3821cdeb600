"""Analyses traces of torch.profiler: kernels and their kinds, ranges, idle time, overlap. Needs no
torch.

read         reads the file event by event
events       turns events into calls on the host and kernels on the device
attribution  finds the operation, range and phase of each kernel
analysis     puts everything together
"""
