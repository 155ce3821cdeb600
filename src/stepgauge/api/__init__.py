"""What `import stepgauge as sg` offers: the functions that the command line calls, for modules and
runs at hand.
"""
