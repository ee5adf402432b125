"""Drafting with the MTP layer."""
