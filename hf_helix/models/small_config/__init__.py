"""Small configurations of any causal LM, which keep what tells its class from others."""

from hf_helix.models.small_config.config import EXPERT_COUNTS, default_config, small_config

__all__ = ["EXPERT_COUNTS", "default_config", "small_config"]
