"""Plug-ins of Headstart for other engines and gateways: a folder for each of them. Imports none of them itself."""
