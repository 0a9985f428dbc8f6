"""Speed and memory, measured beside a ceiling in the same run: ``python -m benchmarks [--json FILE] [PART …]``."""
