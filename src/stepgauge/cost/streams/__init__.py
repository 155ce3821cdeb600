"""A rank's step as works of streams (`program`), when each runs (`events`), what it comes to (`outcome`)."""
