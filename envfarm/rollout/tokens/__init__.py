"""Messages to token ids and back. What the policy sampled is never tokenised again; only what is new is added.

``load_token_builder(folder)`` gives the one that fits a policy folder: the library ``renderers`` where it renders this
model exactly, else an incremental one over the folder's own chat template.
"""

from envfarm.rollout.tokens.builder import Extension, TokenBuilder
from envfarm.rollout.tokens.load import load_token_builder
from envfarm.rollout.tokens.tokenizer import PolicyTokenizer

__all__ = ["Extension", "PolicyTokenizer", "TokenBuilder", "load_token_builder"]
