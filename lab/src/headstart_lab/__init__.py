"""The laboratory of Headstart: experiments, each of which measures one figure and reports it as one JSON document."""
