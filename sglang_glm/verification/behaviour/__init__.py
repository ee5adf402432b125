"""Whether a server of the trained tiny checkpoint retrieves, drafts and talks as it should.

Random weights show that numbers are right; this shows that selection, caches and drafts are right in
use. ``run_behaviour`` asks a running server over HTTP; ``configure_behaviour`` adds its options to a
command line.
"""

from sglang_glm.verification.behaviour.run import configure_behaviour, run_behaviour

__all__ = ["configure_behaviour", "run_behaviour"]
