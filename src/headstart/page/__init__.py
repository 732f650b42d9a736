"""The live page of servers and routers: its files, the prefix tree that it draws, and its stream of figures."""
