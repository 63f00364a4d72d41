"""`kvq models`: the models that have a short name."""

from kvq.commands.options import Json, print_json


def models(as_json: Json = False) -> None:
    """List the models that kvq knows by a short name."""
    from kvq.console import show_models
    from kvq.recipes.models import known_models

    rows = [{"alias": alias, **model.model_dump()} for alias, model in known_models().items()]
    if as_json:
        print_json(rows)
    else:
        show_models(rows)
