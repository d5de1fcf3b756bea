<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology|Labeling" labelsEnabled="1">
<renderer-v2 type="singleSymbol"><symbols><symbol type="marker" name="0"><layer class="SimpleMarker">
<prop k="name" v="cross"/><prop k="outline_color" v="122,79,163,255"/><prop k="outline_width" v="0.6"/>
<prop k="size" v="4"/></layer></symbol></symbols></renderer-v2>
<labeling type="simple"><settings><text-style fieldName="detection" fontSize="9" textColor="122,79,163,255"/>
</settings></labeling></qgis>
