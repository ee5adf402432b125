"""The ``sglang-glm`` command."""
