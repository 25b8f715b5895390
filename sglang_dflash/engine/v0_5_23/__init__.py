"""SGLang 0.5.23, whose own DFLASH worker runs the step, with parts of this package inside."""
