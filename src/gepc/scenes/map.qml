<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology"><pipe>
<rasterrenderer type="singlebandpseudocolor" band="1" opacity="0.8" classificationMin="0" classificationMax="{most:g}">
<rastershader><colorrampshader colorRampType="INTERPOLATED" clip="0">
<item value="0" label="0" color="#000004" alpha="0"/>
<item value="{half:g}" label="{half:.3g}" color="#bb3754" alpha="160"/>
<item value="{most:g}" label="{most:.3g}" color="#fcffa4" alpha="255"/>
</colorrampshader></rastershader></rasterrenderer></pipe></qgis>
