"""The `dsa` attention backend on the CPU, its row plan, and the table of named DSA backends."""
