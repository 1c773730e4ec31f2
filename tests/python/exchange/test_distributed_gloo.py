"""The cases of test_distributed.py over Gloo: a file of its own, which runs beside that one."""

from test_distributed import results_over, test_ranks  # noqa: F401

results = results_over("gloo", 3)
