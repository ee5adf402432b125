"""Text of the trained tiny checkpoint: its words, its tokenizer, its small talk and its notes.

The trainer draws its data from here and ``sglang_glm.verification.behaviour`` its questions.
"""
