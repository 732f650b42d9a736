"""The verbs `top` and `ps`: running servers and routers, and their caches at work, in a terminal."""
