"""The files of a slot: where they lie, what bounds them, and how the host reaches, copies, keeps and removes them.

Model-written code may be changing them meanwhile, so that nothing here trusts a name that it has looked at before.
"""
