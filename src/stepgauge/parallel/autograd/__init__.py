"""What the wrappers use of autograd: parameter hooks, the running backward, custom operators."""
