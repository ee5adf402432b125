"""Synthetic ``glm_moe_dsa`` checkpoints that SGLang and transformers both load.

``spec.CheckpointSpec`` holds every dimension, ``writer.write_checkpoint`` makes the directory.
Importing this package costs nothing; ``writer`` brings torch.
"""
