"""MLA over selected cache rows."""
