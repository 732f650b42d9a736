"""HTTP/1.1 itself: parsing with limits, refusals before there is a request, and the table of connections."""
