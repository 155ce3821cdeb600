"""What an operation, a collective and a term take on a machine, and what each is known by."""
