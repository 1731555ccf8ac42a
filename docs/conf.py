"""Sphinx's settings: Markdown pages by MyST, the API reference from the docstrings."""

from importlib.metadata import version as installed_version

project = "flatweights"
author = "the flatweights developers"
copyright = "2026, the flatweights developers"
release = version = installed_version("flatweights")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["figures/*.json"]
myst_enable_extensions = ["colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3

# A name in single backticks in a docstring is a link to what bears it.
default_role = "py:obj"
autodoc_typehints = "none"  # the signatures show them; "Args" says what they mean
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes of named tuples are documented once
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"flatweights {release}"
html_static_path = ["_static"]
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
