"""How pictures look, those of the demo and of the examples."""

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "legend.frameon": False,
}
