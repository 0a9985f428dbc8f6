"""Inference: the client and pool that speak SGLang's HTTP API, and the embedded engine for one machine.

Only :mod:`envfarm.inference.embedded` and :mod:`envfarm.inference.gguf` import torch, and only when they are used.
"""
