"""The bill of a `glm_moe_dsa` model: parameters, memory, traffic, time.

Pure functions; torch is imported only to open a record of experts.

Every figure is a function whose name carries its unit (`_bytes`, `_us`, `_flops`, `_tokens`).
Sizes are decimal: 1 GB is 1e9 bytes. `plan.build_plan` puts the parts together.
"""
