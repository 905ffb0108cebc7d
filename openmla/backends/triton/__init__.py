"""Portable kernels: one source for SM80 to SM120, any number of heads."""
