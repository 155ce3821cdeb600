"""The fastest measured configuration of a model on this machine.

choices  what may be chosen, and its candidates on a kind of device
search   which candidates are measured: the best by prediction, or one choice at a time
"""
