"""The Python interface, `import stepgauge as sg`: the functions behind the commands, for modules and
runs in this process.
"""
