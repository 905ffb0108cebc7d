"""Portable kernels: one source for SM80 to SM121, any number of heads."""
