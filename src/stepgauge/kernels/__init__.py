"""One folder an operation: reference.py is the oracle, triton.py the kernels, __init__.py the
public function.
"""
