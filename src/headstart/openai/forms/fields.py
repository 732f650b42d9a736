"""Fields of a body that this server does not build: refused or noted as skipped, by the table."""

from collections.abc import Mapping
from typing import Any

from headstart.openai.bounds import Bounds
from headstart.openai.forms.treatments import TREATMENTS, ApiName, Place, Treatment
from headstart.openai.value_checks import unsupported

_LISTED = {api: [row for row in TREATMENTS if (row.api, row.place) == (api, Place.FIELD)] for api in ApiName}


def check_fields(api: ApiName, values: Mapping[str, Any], bounds: Bounds) -> None:
    """Note fields that are skipped, unless their value means "off". Raises InvalidRequestError for refused ones."""
    for row in _LISTED[api]:
        if values.get(row.name) in (None, False, [], {}):
            continue
        if row.treatment is Treatment.REFUSED:
            unsupported(row.name, row.note)
        if row.treatment is Treatment.SKIPPED:
            bounds.skip(Place.FIELD, row.name)
