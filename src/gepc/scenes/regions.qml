<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology|Labeling" labelsEnabled="1">
<renderer-v2 type="singleSymbol"><symbols><symbol type="fill" name="0"><layer class="SimpleFill">
<prop k="style" v="no"/><prop k="outline_color" v="230,60,40,255"/><prop k="outline_width" v="0.8"/>
</layer></symbol></symbols></renderer-v2>
<labeling type="simple"><settings><text-style fieldName="region" fontSize="10" textColor="230,60,40,255"/>
</settings></labeling></qgis>
