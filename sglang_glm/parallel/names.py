"""Names that flags accept for parallel execution."""

#: `--moe-a2a-backend`: dispatch and combine over torch.distributed.
ALL_TO_ALL = "glm_a2a"
