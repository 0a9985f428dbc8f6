"""A small inference engine for one machine: continuous batching over any Hugging Face causal LM, on the CPU.

It serves SGLang's HTTP routes, so that the client that speaks to it also speaks to SGLang. Nothing here is imported
by the rest of the farm: the engine is a process of its own (``envfarm engine``).
"""
