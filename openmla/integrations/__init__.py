"""Bridges to what people already run; nothing in the package imports these."""
