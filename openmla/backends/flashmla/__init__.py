"""Adapter to FlashMLA's kernels, if the package flash_mla is installed."""
