"""What tests and benchmarks share: shapes, hostile inputs, comparators, poison."""
