"""FlashMLA's kernels, if the package flash_mla is installed: arguments converted, and back."""
