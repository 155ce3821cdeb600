"""What wrappers ask of autograd: hooks of parameters, the backward that goes on, operators of our own."""
