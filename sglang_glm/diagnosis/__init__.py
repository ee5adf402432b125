"""What `sglang-glm doctor` looks at."""
