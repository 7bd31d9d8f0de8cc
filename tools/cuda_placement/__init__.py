"""Where the nodes of the zoo's graphs would run on a CUDA device, asked on a machine without one."""
