"""A rank's step as work on streams.

`program` writes the work down, `events` simulates when each piece runs, `outcome` summarises it, and
`ledger` makes the rows of a record's table of terms.
"""
