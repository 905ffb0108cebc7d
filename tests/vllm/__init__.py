"""The real engine: vLLM with openmla as its attention backend. `make test-vllm`, not `make test`.

Nothing here is called test_*.py, so pytest collects none of it: it runs where vLLM is installed.
"""
