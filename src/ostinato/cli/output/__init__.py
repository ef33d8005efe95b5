"""Tables, plots and streams of text.

Files in reading order:

* ``cache_tables``: tables of ``cache``
* ``demo_tables``: tables of ``demo``
* ``simulation_output``: tables, plots and files of ``simulate``
* ``tables``: prints a table
* ``template_table``: what a chat template loses of earlier turns
* ``report_folder``: the folder of a report
* ``streaming``: prints text as it is generated
"""
