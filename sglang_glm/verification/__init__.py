"""Checks a server against transformers' own ``GlmMoeDsaForCausalLM``.

``oracle`` runs the checkpoint, ``formats`` imitates the caches' number formats, ``near_tie`` proves
where a selection is decided by rounding, ``compare`` sets a server's log-probabilities against the
oracle's, and ``draft`` simulates MTP decoding.
"""
