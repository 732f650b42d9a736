"""What the router knows of each prefix cache of a replica."""
