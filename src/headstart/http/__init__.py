"""HTTP code shared by server and gateway: protocol limits, API keys, access log, errors, lifecycle."""
