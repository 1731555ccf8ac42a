"""Sphinx's settings: Markdown pages by MyST, the API reference from the docstrings."""

from importlib.metadata import metadata
from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

project = "flatweights"
author = "the flatweights developers"
copyright = "2026, the flatweights developers"
release = version = metadata("flatweights")["Version"]
links = dict(link.split(", ") for link in metadata("flatweights").get_all("Project-URL", []))

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["figures/*.json"]
myst_enable_extensions = ["colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3

# A name in single backticks in a docstring is a link to the object of that name.
default_role = "py:obj"
autodoc_typehints = "none"  # the signatures show them; "Args" says what they mean
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes of named tuples are documented once
napoleon_custom_sections = [("Attributes", "params_style")]  # and not headed "Variables"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
autoclass_content = "both"  # arguments of a class are documented in its constructor
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"flatweights {release}"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": True,
    "source_repository": links["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}

# A name in a docstring that no object has is an error, so renaming cannot leave one behind.
nitpicky = True
# Names that are documented elsewhere, where they cannot be looked up without a network.
ELSEWHERE = ("tf.", "tf_keras", "keras.", "ray.", "numpy.", "scipy.", "mmap", "copy.", "dict.")


def find_in_all_modules(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element
) -> Element | None:
    """Return a link to the object of that name, in the module that documents it."""
    target: str = node["reftarget"]
    if target.startswith(ELSEWHERE):
        return text
    python = env.domains.python_domain
    # Attributes are described with their class and have no place of their own.
    owner = target.rpartition(".")[0] or node.get("py:class", "")
    for wanted in filter(None, (target, owner)):
        names = [
            name
            for name, entry in python.objects.items()
            if name.endswith(f".{wanted}") and not entry.aliased
        ]
        if len(names) > 1:  # one name in several modules: the one of this page
            names = [name for name in names if name == f"{node.get('py:module')}.{wanted}"]
        if len(names) == 1:
            (name,) = names
            return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, text)
    return None


def keep_first_line(
    _app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Keep Napoleon from reading the text before a colon as the type of a property."""
    if what in ("property", "attribute"):
        lines[:0] = ["..", ""]  # an empty comment


def setup(app: Sphinx) -> None:
    """Make Sphinx call the functions above."""
    app.connect("missing-reference", find_in_all_modules)
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)
