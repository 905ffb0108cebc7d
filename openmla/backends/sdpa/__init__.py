"""torch's own kernels: attention that returns the log-sum-exp, and on CPUs batched matmul."""
