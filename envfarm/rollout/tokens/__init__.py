"""Messages to token ids and back. What the policy sampled is never tokenised again; only what is new is added.

``load_rendering(folder)`` gives the :class:`Rendering` of a policy folder: the library ``renderers`` where it renders
this model exactly, else an incremental one over the folder's own chat template.
"""

from envfarm.rollout.tokens.load import load_rendering
from envfarm.rollout.tokens.rendering import Extension, Rendering
from envfarm.rollout.tokens.tokenizer import PolicyTokenizer

__all__ = ["Extension", "PolicyTokenizer", "Rendering", "load_rendering"]
